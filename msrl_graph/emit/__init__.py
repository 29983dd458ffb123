"""Emitters: what a compilation shows, one format a file.

Invariant: an emitter only reads; the same input gives the same text. rich, jinja2 and msgspec are imported by those
that use them, when they are used.
"""
