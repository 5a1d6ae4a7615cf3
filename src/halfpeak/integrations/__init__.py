"""halfpeak inside loops of other libraries: torch's GradScaler, timm, Lightning, accelerate and transformers."""
