"""The console command `accelerate`: its subcommands, each in a module with a parser and a function."""
