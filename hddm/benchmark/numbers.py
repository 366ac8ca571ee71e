"""Numbers as people read them."""


def number(value: float, signed: bool = False) -> str:
    """A figure with as many decimals as its size asks for."""
    size = abs(value)
    decimals = 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 3 if size >= 0.01 else 4
    return f"{value:{'+' if signed else ''}.{decimals}f}".replace("-", "−")


def span(ends: tuple[float, float]) -> str:
    """Both ends of an interval, signed."""
    low, high = (number(end, signed=True) for end in ends)
    return f"{low} … {high}"


def scientific(value: float) -> str:
    """Operations as 1.23e15."""
    return f"{value:.2e}".replace("e+", "e")
