"""Python's messages about abstract methods, which have quotes from Python 3.12 on."""


def missing_methods(names: str) -> str:
    """Pattern of the message about abstract methods, whose names are separated by commas."""
    return "abstract methods? '?" + names.replace(", ", "'?, '?")
