"""Tutorials: scripts to read and to run."""
