"""infinity: train what does not fit, with parameters, gradients and Adam states in HBM, CPU memory and NVMe files."""
