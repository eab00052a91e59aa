"""`vllm serve --headless`, whose program asks for a package by a name that CPU builds do not have."""

import sys

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
    args.api_server_count = 0
    run_headless(args)
