"""The lens: observe and change what a model computes, whichever library it comes from."""
