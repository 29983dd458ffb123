"""Emitters, which format the results of a compilation: one format per module.

Invariant: an emitter only reads its input, and the same input gives the same text. rich, jinja2 and msgspec are
imported only by the emitters that use them, and only when such an emitter is imported.
"""
