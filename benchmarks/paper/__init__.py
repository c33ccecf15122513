"""The paper's experiments and its theory, as something that a user runs."""
