"""Published selection rules of other training-free drafters, each at its own best, behind the engine's drafter interface.

Written from the papers' ideas for comparison in one engine; the package itself drafts with `reader_rag.draft`.
"""
