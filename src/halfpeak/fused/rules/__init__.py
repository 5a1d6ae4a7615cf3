"""Update rules, each written once as a function of tensors."""
