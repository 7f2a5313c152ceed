"""Collectives over nested data that name a mistake instead of hanging.

The room knows no state of the library: a `Channel` and `Limits` are passed in. `tree` and `leaves` take data apart, `codec` makes
bytes of plain objects, `verify` is the guard, `beacon` knows where every rank is, `channel` waits, `gather` and `ops` are the verbs.
"""
