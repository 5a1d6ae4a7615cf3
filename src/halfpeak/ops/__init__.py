"""The operations of a step on lists of tensors; a trailing underscore marks those that write in place.

:mod:`~halfpeak.ops.reference` defines each operation, one tensor at a time; the engine calls those of
:mod:`~halfpeak.ops.foreach`, which handle whole lists.
"""
