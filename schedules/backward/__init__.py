"""The backward pass of a layer on GPUs: the recurrence of its adjoint, and what goes over all steps at once."""
