"""halfpeak inside other people's training loops: torch's GradScaler, timm, Lightning, accelerate and transformers."""
