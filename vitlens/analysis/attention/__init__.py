"""Attention weights and what follows from them: rollout, relevance, flow, query and key views."""
