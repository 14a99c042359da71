"""What a layer's gradients take: the recurrence of its adjoint."""
