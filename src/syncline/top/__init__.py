"""The live view of a job in a terminal: `syncline top`. Needs the extra `top`.

`looking` asks the coordinator once a second, in a thread; `rows` makes words and numbers of a look; `logs` reads the
end of a member's log; `app` shows them, and is the only module that imports textual.
"""
