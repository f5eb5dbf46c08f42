from pfedla.cli import main

main()
