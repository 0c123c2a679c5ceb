"""A module for each endpoint."""
