from zclip.bench.cli import main

main()
