"""The backward pass apart from its recurrence: kernels that go over all steps at once."""
