"""`python -m insitu.train.devices BACKEND` lists the devices of a backend as JSON."""

from insitu.train.devices.names import main

main()
