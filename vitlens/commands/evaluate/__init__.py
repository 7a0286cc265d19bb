"""`vitlens evaluate`: accuracy, calibration and confusions of models on labelled images."""
