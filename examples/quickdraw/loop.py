"""A custom loop for answers.py: `strategy.run` does a step on each replica's rows."""

import keras


def make_step(strategy, model, optimizer):
    """Return a function of (images, labels) that trains on a replica's rows, and returns its loss."""
    row_losses = keras.losses.SparseCategoricalCrossentropy(reduction="none")

    def forward(images, labels):
        outputs = model(images, training=True)
        # The sum over all replicas is the mean over all rows of the step.
        return strategy.compute_average_loss(row_losses(labels, outputs))

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        def step(images, labels):
            with tf.GradientTape() as tape:
                loss = forward(images, labels)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

    elif keras.backend.backend() == "jax":
        import jax

        def pure(trainable, others, images, labels):
            outputs, others = model.stateless_call(trainable, others, images, training=True)
            return strategy.compute_average_loss(row_losses(labels, outputs)), others

        def step(images, labels):
            trainable = [v.value for v in model.trainable_variables]
            others = [v.value for v in model.non_trainable_variables]
            gradient = jax.value_and_grad(pure, has_aux=True)
            (loss, others), gradients = gradient(trainable, others, images, labels)
            for variable, value in zip(model.non_trainable_variables, others, strict=True):
                variable.assign(value)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

    else:

        def step(images, labels):
            model.zero_grad()
            loss = forward(images, labels)
            loss.backward()
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
            return loss.detach()

    return step


def train(strategy, model, optimizer, data, epochs, end_epoch):
    """Train for some epochs; `end_epoch` is called with the number of each and the mean of its losses."""
    step, batches = make_step(strategy, model, optimizer), strategy.distribute_dataset(data)
    for epoch in range(epochs):
        losses = [
            float(strategy.reduce("sum", strategy.run(step, args=(images, labels))))
            for images, labels in batches
        ]
        end_epoch(epoch, sum(losses) / len(losses))
    if hasattr(strategy, "join"):
        strategy.join()  # on parameter servers: until all workers are here, and with their gradients
