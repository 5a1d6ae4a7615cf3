"""The files of the corpus are old code: they are read and run by the tests, never collected."""

collect_ignore_glob = ["corpus/*"]
