//! A side of a connection that gives up once no byte has come, or gone, for a while.

use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

#[derive(Debug)]
pub(super) struct Silent<S> {
    inner: S,
    limit: Duration,
    timer: Pin<Box<Sleep>>,
    /// Whether it has been waiting since the timer was set.
    waits: bool,
}

impl<S> Silent<S> {
    pub(super) fn new(inner: S, limit: Duration) -> Self {
        Self { inner, limit, timer: Box::pin(sleep(limit)), waits: false }
    }

    fn wait<T>(&mut self, polled: Poll<Result<T>>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        if polled.is_ready() {
            self.waits = false;
            return polled;
        }
        if !self.waits {
            self.waits = true;
            self.timer.as_mut().reset(Instant::now() + self.limit);
        }
        ready!(self.timer.as_mut().poll(cx));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "no byte for too long")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Silent<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_read(cx, buffer);
        this.wait(polled, cx)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Silent<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_write(cx, bytes);
        this.wait(polled, cx)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_flush(cx);
        this.wait(polled, cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}
