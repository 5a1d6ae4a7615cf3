"""halfpeak inside other people's loops: torch's GradScaler, timm, Lightning, accelerate and transformers."""
