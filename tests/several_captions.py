"""The captions of the samples in `captions_dataset`."""


def captions_of(number: int) -> list[str]:
    """One to five captions, none of which another number has."""
    return [f"picture {number} in the words of {name}" for name in ("Ada", "Bo", "Cy", "Di", "Ed")[: 1 + number % 5]]
