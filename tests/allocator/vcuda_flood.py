"""
Calls RegisterVDevice so often, from a process of its own that runs as `nobody` where it may, and prints how often it was
answered with which code.
"""

import json
import os
import sys
from collections import Counter

import grpc

METHOD = "/vcuda.VCUDAService/RegisterVDevice"
NOBODY = 65_534


def main() -> None:
    directory, times = sys.argv[1:]
    grpc.insecure_channel("unix:nowhere").close()  # what it imports is read as root
    os.chdir(directory)  # which nobody could not
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    codes: Counter[str] = Counter()
    sys.stdin.readline()  # until this process is in the container that it is to be in
    with grpc.insecure_channel("unix:vcuda.sock") as channel:
        call = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
        for _ in range(int(times)):
            try:
                call(b"\x12\x05uid-p", timeout=30)
                codes["OK"] += 1
            except grpc.RpcError as error:
                codes[error.code().name] += 1
    print(json.dumps(codes))


main()
