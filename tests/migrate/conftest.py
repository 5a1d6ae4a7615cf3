"""Excludes the corpus from collection: it is old code, which the tests read and run."""

collect_ignore_glob = ["corpus/*"]
