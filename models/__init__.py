"""A transformer that trains with jaxcp: `python -m models.train`."""
