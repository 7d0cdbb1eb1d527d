"""Reports of a run: what happened when, as data, as a picture and as one HTML file.

``Timeline`` holds the measurements, `page` makes a page of them that needs no other file, and ``penstock report`` draws
them as well (which needs matplotlib). Nothing here imports pyspark.
"""

from penstock.report._html import page
from penstock.report._timeline import Change, Check, Epoch, Migration, Slice, Timeline, Window, WorkerSample

__all__ = ["Change", "Check", "Epoch", "Migration", "Slice", "Timeline", "Window", "WorkerSample", "page"]
