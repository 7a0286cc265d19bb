"""`vitlens attention`: attention weights by layer and head, as maps on the image."""
