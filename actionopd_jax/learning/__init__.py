"""The numbers of the method: rewards, advantages, prefix trees, packing, surrogate."""
