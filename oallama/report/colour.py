"""The colour scale of the affinity map: perceptually uniform, and readable without seeing hue.

A scale is a straight line in OKLab (B. Ottosson, "A perceptual color space for image processing", 2020), so equal steps
of affinity are equal steps of colour; its lightness rises or falls strictly, so it survives colour blindness and grey
print. It runs from near the page's background (0) to far from it (1), hence one scale for light pages and one for dark.
"""

from __future__ import annotations

from dataclasses import dataclass

Lab = tuple[float, float, float]  # OKLab: lightness 0..1, green-red, blue-yellow

N_STEPS = 21
"""Steps of the scale: affinity is shown to the nearest 0.05."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A line in OKLab between two sRGB colours."""

    low: str  # affinity 0, #rrggbb
    high: str  # affinity 1

    def colour(self, value: float) -> str:
        """The colour of an affinity 0..1 as #rrggbb; values outside are clamped."""
        t = min(1.0, max(0.0, value))
        low, high = to_oklab(self.low), to_oklab(self.high)
        lightness, a, b = (one + (other - one) * t for one, other in zip(low, high, strict=True))
        return from_oklab((lightness, a, b))

    def ink(self, value: float) -> str:
        """Black or white, whichever can be read better on `colour(value)`."""
        colour = self.colour(value)
        return max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, colour))


LIGHT = Scale(low="#dfe9f0", high="#0b3a78")
DARK = Scale(low="#22303d", high="#a8dcff")


def step(value: float) -> int:
    """The index, 0..N_STEPS - 1, of the step nearest to an affinity."""
    return round(min(1.0, max(0.0, value)) * (N_STEPS - 1))


def stylesheet() -> str:
    """CSS: variables --q0.. (fill) and --i0.. (ink) for both schemes, and the classes .q0.. that use them."""
    values = [index / (N_STEPS - 1) for index in range(N_STEPS)]

    def variables(scale: Scale) -> str:
        return "".join(f"--q{i}:{scale.colour(v)};--i{i}:{scale.ink(v)};" for i, v in enumerate(values))

    classes = "".join(f".q{i}{{--fill:var(--q{i});--ink-on-fill:var(--i{i})}}" for i in range(N_STEPS))
    return (
        f":root{{{variables(LIGHT)}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}\n{classes}\n"
    )


def to_oklab(colour: str) -> Lab:
    """#rrggbb (sRGB) to OKLab."""
    r, g, b = (_linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def from_oklab(lab: Lab) -> str:
    """OKLab to #rrggbb, clipped to sRGB."""
    lightness, a, b = lab
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    rgb = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(1.0, max(0.0, channel)))):02x}" for channel in rgb)


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two colours, 1..21."""
    brighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    r, g, b = (_linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)


def _gamma(channel: float) -> float:
    return 12.92 * channel if channel <= 0.0031308 else float(1.055 * channel ** (1 / 2.4) - 0.055)
