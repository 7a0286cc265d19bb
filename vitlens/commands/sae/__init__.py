"""`vitlens sae`: a sparse autoencoder of a layer: trained, measured, and its latents tested."""
