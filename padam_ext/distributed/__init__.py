"""Training in several processes. Nothing is imported here: some of it takes long to import."""
