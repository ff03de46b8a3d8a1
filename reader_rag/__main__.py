"""`python -m reader_rag` is `reader-rag`."""

from reader_rag.cli import main

raise SystemExit(main())
