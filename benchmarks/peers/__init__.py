"""Other libraries' models, started where ours start and read back into ours."""
