"""Emitters: what a compilation shows, one format per file.

Invariant: an emitter only reads; the same input gives the same text. rich, jinja2 and msgspec are imported only by the
emitters that use them, and only then.
"""
