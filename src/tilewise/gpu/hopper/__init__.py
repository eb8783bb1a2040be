"""Warp-specialised kernels for NVIDIA Hopper (sm_90a), written in Gluon, Triton's explicit dialect."""
