"""The picture of the links: time over bytes, measured, with the fitted lines."""

from pathlib import Path

from shardwise.doctor.diagnosis import Diagnosis


def draw(found: Diagnosis, path: Path) -> None:
    """A panel for each axis, both scales logarithmic."""
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(fit.axis for fit in found.fits))
    figure = Figure(figsize=(5.5 * max(1, len(axes)), 4.2), layout="constrained")
    panels = figure.subplots(1, max(1, len(axes)), squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=False):
        for fit in [fit for fit in found.fits if fit.axis == axis]:
            own = [t for t in found.timings if (t.axis, t.collective) == (axis, fit.collective)]
            sent = [timing.sent_bytes for timing in own]
            measured = [timing.seconds * 1e3 for timing in own]
            (points,) = panel.plot(sent, measured, "o", markersize=4, label=fit.collective)
            line = [fit.seconds(each) * 1e3 for each in sent]
            panel.plot(sent, line, color=points.get_color(), linewidth=1)
        panel.set(xscale="log", yscale="log", title=f"axis {axis} of {found.mesh}")
        panel.set(xlabel="bytes that a rank sends", ylabel="ms")
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
