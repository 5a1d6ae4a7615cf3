"""The tensor verbs of a step: lists of tensors in, effects named by a trailing underscore.

:mod:`~halfpeak.ops.reference` says what each verb means, one tensor at a time; :mod:`~halfpeak.ops.foreach` does the
same over whole lists and is what the engine calls.
"""
