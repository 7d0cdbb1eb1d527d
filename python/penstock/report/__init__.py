"""Reports of a run: what happened when, as data, as a picture and as one HTML file.

``Timeline`` holds the measurements, ``plot.latency_png`` draws them (needs matplotlib, imported only
then), ``html.page`` writes a page that needs no other file. Nothing here imports pyspark.
"""

from penstock.report._timeline import Change, Epoch, Migration, Slice, Timeline, Window, WorkerSample

__all__ = ["Change", "Epoch", "Migration", "Slice", "Timeline", "Window", "WorkerSample"]
