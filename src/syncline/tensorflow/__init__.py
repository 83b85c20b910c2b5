"""Syncline for TensorFlow below Keras: loops with tf.GradientTape."""
