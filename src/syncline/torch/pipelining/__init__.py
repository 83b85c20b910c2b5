"""Model parallelism: a model in stages, one per process of a pipeline."""

# Layout, in reading order.
#
# pipeline          Pipeline: the whole model, as the script sees it
# cutting           where a model is cut
# deferred          deferred_init: a model that is built without memory
# leading           the leader of a pipeline, which drives the stage processes
# holding           the tensors of a model by number, and which of them a process has
# orders            what the leader of a pipeline tells its stage processes
# group             the process group of a pipeline, or its part of the script's
# shared            parameters, buffers and gradients that the processes of a pipeline share
# engine            this process's stages under torch.distributed.pipelining
# serving           a stage process after its Pipeline is made
# randomness        the random numbers of stage processes
# lacking           what a process says that has no memory
# scheduling        where the model of a running pipeline is cut
# layers            a model as layers that can be cut apart
# profile           what the layers cost, measured
# plan_only         `syncline plan-stages`
