"""Texts of clients in logs, terminals and pages."""


def printable(text: str) -> str:
    """Escape non-printable characters, which could move the cursor or change the writing direction of a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
