"""Tutorials as scripts in the percent format of notebooks."""
