"""Forms: how the numbers of an optimizer are stored in fewer bytes than float32."""
