"""TPCx-BB Q1 to Q4 and Q15 as ordered pipelines.

Owns: eleven outputs of five queries over the clicks of a web shop and the sales of its stores, computed row by row in
the order of the stream (``seq``), with state per user, ticket, item or category. Parameters come from ``params.json``
of the input folder.

=========== ================================================= ========================================== =======
query       what                                              columns                                    order
=========== ================================================= ========================================== =======
q1_pairs    pairs of items sold on one ticket                 item_sk_1, item_sk_2, cnt
q1          the 100 pairs sold together most often            the same                                   yes
q2_sessions clicks on items with the session of their user    seq, wcs_user_sk, wcs_item_sk, session     yes
q2_pairs    items viewed in a session with one item           item_sk_1, item_sk_2, cnt
q2          the 30 of them viewed most often                  the same                                   yes
q3_views    the last views before each purchase of one item   purchase_seq, view_seq, lastviewed_item
q3          the 100 items viewed most often before it         purchased_item, lastviewed_item, cnt       yes
q4_carts    sessions that end with an abandoned cart          wcs_user_sk, session, pages, last_seq
q4          how many pages they have on average               pages, sessions, avg_pages                 one row
q15_all     a line through the daily sales of each category   cat, n, sx, sy, sxy, sxx, slope, intercept
q15         the categories that do not grow                   cat, slope, intercept                      yes
=========== ================================================= ========================================== =======

``order`` says whether the order of the rows is part of the result; those of the others are the same in every run, too.
A session ends when its user's next row comes more than ``session_timeout_s`` later. The sums of q15_all are exact; they
are written as bigint, or as decimal(38, 0) where one is larger. q4 without an abandoned cart is (null, 0, null).

Source: TPCx-BB, after the reading of gpu-bdb; as streams they are ours.
"""

from __future__ import annotations

from penstock.workloads.tpcxbb.hosts import check, run_local, run_spark
from penstock.workloads.tpcxbb.queries import QUERIES, Query, find, narrow, pack, pipeline
from penstock.workloads.tpcxbb.tables import Params, in_order, load_params, read, read_spark, rows

__all__ = [
    "QUERIES",
    "Params",
    "Query",
    "check",
    "find",
    "in_order",
    "load_params",
    "narrow",
    "pack",
    "pipeline",
    "read",
    "read_spark",
    "rows",
    "run_local",
    "run_spark",
]
