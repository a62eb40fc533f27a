//! Commands for the leader: each is answered once, by whoever leads, or forgotten at its time limit.

use std::time::Duration;

use coord_core::{
    Answer, Answered, AttemptId, ClaimRequest, Fence, NodeId, Origin, REQUEST_BYTES_MAX, Request,
    RequestId, ShardCount, TableHeader, TableName, Term,
};
use futures::future::join_all;

use crate::case::{Done, cases, ensure, want};
use crate::cx::{Client, Cx, lease_name};
use crate::faults::Fault;
use crate::view::{RequestsView, Watched};

cases! { "requests":
    /// A submitted request is seen by every handle, also by a watch that begins later.
    a_request_is_seen => ["request"];
    /// The same request, submitted again, is one request.
    a_request_may_be_repeated => ["request", "dropped-calls"];
    /// The answer of the leader is seen by whoever asked.
    an_answer_is_seen => ["request"];
    /// A request is answered once: the same answer may be repeated, another one is refused.
    a_request_is_answered_once => ["request-answer"];
    /// Of many answers at one moment one is recorded.
    one_of_many_answers_is_recorded => ["request-answer"];
    /// Only the fence that claimed the reserved table answers.
    an_answer_is_fenced => ["request-answer", "table-fence"];
    /// A request is forgotten once its time limit has passed, answered or not, and not before.
    a_request_is_forgotten_at_its_limit => ["request-limit"];
    /// A request that is submitted again is forgotten at the limit of the first submission.
    a_repeated_request_keeps_its_limit => ["request-limit"];
    /// Answering what nobody asked is told that it is gone.
    answering_an_unknown_request_is_gone => ["request-limit"];
    /// Bodies of the largest size pass both ways.
    large_bodies_pass => ["request"];
    /// A watch begins with a snapshot, also when nobody asks anything.
    a_watch_begins_with_a_snapshot => ["watch-snapshot"];
    /// A cut watch ends, and the next one shows what was asked and answered meanwhile.
    a_cut_watch_misses_nothing => ["watch-ends", "scenario-l", "P37"];
}

/// Longer than any trial: it does not run out by itself.
const LONG: Duration = Duration::from_secs(600);

fn fence(term: u64) -> Done<Fence> {
    let origin = Origin::new("conformance:elsewhere/cluster");
    Ok(Fence::new(lease_name("leader")?, Term::from_u64(term), AttemptId::random(), origin))
}

/// Claims the reserved table, as a leader does.
async fn lead(client: &Client, fence: &Fence) -> Done {
    let header = TableHeader::new(ShardCount::new(1)?);
    let request = ClaimRequest::new(TableName::cluster(), fence.clone(), header);
    let outcome = client.placement.claim(&request).await?;
    want!(outcome, coord_core::Claim::Claimed(_) => (), "the reserved table is claimed");
    Ok(())
}

async fn ask(client: &Client, body: &'static str, limit: Duration) -> Done<Request> {
    let request = Request::new(NodeId::new("node-1")?, limit, body)?;
    let id = client.placement.request(&request).await?;
    ensure!(id == request.id, "submitted {}, and got the id {id}", request.id);
    Ok(request)
}

/// Answers, which has to be recorded.
async fn answer(client: &Client, id: &RequestId, fence: &Fence, body: &'static str) -> Done {
    let answer = Answer::new(body)?;
    let outcome = client.placement.answer(id, fence, &answer).await?;
    want!(outcome, Answered::Recorded => (), "the answer is recorded");
    Ok(())
}

async fn a_request_is_seen(cx: &Cx) -> Done {
    let (client, leader) = (cx.open().await?, cx.open().await?);
    let mut watched = Watched::requests(&leader, cx.soon()).await?;
    let request = ask(&client, "drain node-3", LONG).await?;
    let seen = |view: &RequestsView| {
        view.requests.get(&request.id).is_some_and(|it| it.request == request)
    };
    watched.until("the request is there", cx.soon(), seen).await?;
    let later = Watched::requests(&leader, cx.soon()).await?;
    ensure!(seen(&later.view), "a later watch shows {:?}", later.view);
    Ok(())
}

async fn a_request_may_be_repeated(cx: &Cx) -> Done {
    let (client, leader) = (cx.open().await?, cx.open().await?);
    let mut watched = Watched::requests(&leader, cx.soon()).await?;
    let request = ask(&client, "drain node-3", LONG).await?;
    for by in [&client, &leader] {
        let id = by.placement.request(&request).await?;
        ensure!(id == request.id, "repeated, it got the id {id}");
    }
    // The view refuses to see it submitted twice.
    let other = ask(&client, "drain node-4", LONG).await?;
    // In whatever order: nothing is said of that between two requests.
    let both = |view: &RequestsView| {
        view.requests.contains_key(&request.id) && view.requests.contains_key(&other.id)
    };
    watched.until("both requests are there", cx.soon(), both).await?;
    let count = watched.view.requests.len();
    ensure!(count == 2, "two requests are shown as {count}");
    let fence = fence(5)?;
    lead(&leader, &fence).await?;
    answer(&leader, &request.id, &fence, "done").await?;
    client.placement.request(&request).await?;
    let later = Watched::requests(&leader, cx.soon()).await?;
    let answered = later.view.requests.get(&request.id).and_then(|it| it.answer.as_ref());
    ensure!(answered.is_some(), "repeating the request lost its answer");
    Ok(())
}

async fn an_answer_is_seen(cx: &Cx) -> Done {
    let (client, leader) = (cx.open().await?, cx.open().await?);
    let fence = fence(5)?;
    lead(&leader, &fence).await?;
    let mut watched = Watched::requests(&client, cx.soon()).await?;
    let request = ask(&client, "drain node-3", LONG).await?;
    answer(&leader, &request.id, &fence, "done").await?;
    let seen = |view: &RequestsView| {
        let answer = view.requests.get(&request.id).and_then(|it| it.answer.as_ref());
        answer.is_some_and(|answer| answer.body == "done")
    };
    watched.until("the answer is there", cx.soon(), seen).await?;
    let later = Watched::requests(&client, cx.soon()).await?;
    ensure!(seen(&later.view), "a later watch shows {:?}", later.view);
    Ok(())
}

async fn a_request_is_answered_once(cx: &Cx) -> Done {
    let (client, leader) = (cx.open().await?, cx.open().await?);
    let (low, high) = (fence(5)?, fence(6)?);
    lead(&leader, &low).await?;
    let request = ask(&client, "drain node-3", LONG).await?;
    answer(&leader, &request.id, &low, "done").await?;
    answer(&leader, &request.id, &low, "done").await?;
    lead(&client, &high).await?;
    let outcome = client.placement.answer(&request.id, &high, &Answer::new("no")?).await?;
    let first = want!(outcome, Answered::Already(answer) => answer,
        "another answer is told of the first");
    ensure!(first.body == "done", "told of {first:?}");
    Ok(())
}

async fn one_of_many_answers_is_recorded(cx: &Cx) -> Done {
    const ANSWERS: usize = 8;
    let clients = [cx.open().await?, cx.open().await?];
    let fence = fence(5)?;
    lead(&clients[0], &fence).await?;
    let request = ask(&clients[0], "drain node-3", LONG).await?;
    let answers: Vec<Answer> =
        (0..ANSWERS).map(|n| Answer::new(format!("answer {n}"))).collect::<Result<_, _>>()?;
    let tries = answers.iter().enumerate();
    let tries =
        tries.map(|(n, answer)| clients[n % 2].placement.answer(&request.id, &fence, answer));
    let outcomes = join_all(tries).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let recorded = outcomes.iter().filter(|outcome| **outcome == Answered::Recorded).count();
    ensure!(recorded == 1, "{recorded} of {ANSWERS} answers were recorded");
    Ok(())
}

async fn an_answer_is_fenced(cx: &Cx) -> Done {
    let (client, leader) = (cx.open().await?, cx.open().await?);
    let request = ask(&client, "drain node-3", LONG).await?;
    let (low, high, text) = (fence(5)?, fence(6)?, Answer::new("done")?);
    let outcome = leader.placement.answer(&request.id, &low, &text).await?;
    want!(outcome, Answered::Fenced(None) => (), "nobody leads, and nobody answers");
    lead(&leader, &low).await?;
    lead(&client, &high).await?;
    for odd in [low, fence(6)?, fence(7)?] {
        let outcome = leader.placement.answer(&request.id, &odd, &text).await?;
        let by = want!(outcome, Answered::Fenced(by) => by, "{odd:?} is fenced");
        ensure!(by.as_ref() == Some(&high), "fenced by {by:?}, not by {high:?}");
    }
    answer(&client, &request.id, &high, "done").await
}

async fn a_request_is_forgotten_at_its_limit(cx: &Cx) -> Done {
    let (client, leader) = (cx.open().await?, cx.open().await?);
    let fence = fence(5)?;
    lead(&leader, &fence).await?;
    let mut watched = Watched::requests(&leader, cx.soon()).await?;
    let limit = cx.ttl().get();
    let sent = tokio::time::Instant::now();
    let plain = ask(&client, "drain node-3", limit).await?;
    let answered = ask(&client, "drain node-4", limit).await?;
    let kept = ask(&client, "drain node-5", LONG).await?;
    answer(&leader, &answered.id, &fence, "done").await?;
    let all = |view: &RequestsView| view.requests.len() == 3;
    watched.until("all are there", cx.soon(), all).await?;
    let late = limit + cx.profile.expiry_delay;
    let forgotten = |view: &RequestsView| view.requests.len() == 1;
    watched.until("two are forgotten", late, forgotten).await?;
    let after = sent.elapsed() + cx.profile.clock_slack;
    ensure!(
        after >= limit,
        "forgotten {after:?} after they were submitted; the limit is {limit:?}"
    );
    for id in [plain.id, answered.id] {
        let outcome = leader.placement.answer(&id, &fence, &Answer::new("done")?).await?;
        want!(outcome, Answered::Gone => (), "answering what is forgotten");
    }
    let later = Watched::requests(&client, cx.soon()).await?;
    let ids: Vec<&RequestId> = later.view.requests.keys().collect();
    ensure!(ids == [&kept.id], "a later watch shows {ids:?}");
    Ok(())
}

async fn a_repeated_request_keeps_its_limit(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let mut watched = Watched::requests(&other, cx.soon()).await?;
    let limit = cx.ttl().get();
    let request = ask(&client, "drain node-3", limit).await?;
    let submitted = tokio::time::Instant::now();
    watched.until("it is there", cx.soon(), |view| view.requests.len() == 1).await?;
    cx.sleep_percent(cx.ttl(), 60).await;
    client.placement.request(&request).await?;
    let end = submitted + limit + cx.profile.expiry_delay;
    let left = end.saturating_duration_since(tokio::time::Instant::now());
    watched.until("it is forgotten", left, |view| view.requests.is_empty()).await
}

async fn answering_an_unknown_request_is_gone(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let fence = fence(5)?;
    lead(&client, &fence).await?;
    let answer = Answer::new("done")?;
    let outcome = client.placement.answer(&RequestId::random(), &fence, &answer).await?;
    want!(outcome, Answered::Gone => (), "answering what nobody asked");
    Ok(())
}

async fn large_bodies_pass(cx: &Cx) -> Done {
    let (client, leader) = (cx.open().await?, cx.open().await?);
    let fence = fence(5)?;
    lead(&leader, &fence).await?;
    let body: Vec<u8> = (0..REQUEST_BYTES_MAX).map(|n| n.to_le_bytes()[0]).collect();
    let request = Request::new(NodeId::new("node-1")?, LONG, body.clone())?;
    client.placement.request(&request).await?;
    let said = Answer::new(body)?;
    let outcome = leader.placement.answer(&request.id, &fence, &said).await?;
    want!(outcome, Answered::Recorded => (), "the answer is recorded");
    let watched = Watched::requests(&client, cx.soon()).await?;
    let record = watched.view.requests.get(&request.id);
    ensure!(
        record.is_some_and(|it| it.request == request && it.answer.as_ref() == Some(&said)),
        "the bodies did not pass whole"
    );
    Ok(())
}

async fn a_watch_begins_with_a_snapshot(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let empty = Watched::requests(&client, cx.soon()).await?;
    ensure!(empty.view.requests.is_empty(), "the first snapshot is {:?}", empty.view);
    Ok(())
}

async fn a_cut_watch_misses_nothing(cx: &Cx) -> Done {
    let (client, leader) = (cx.open().await?, cx.open().await?);
    let faults = client.faults(&[Fault::CutWatches])?;
    let fence = fence(5)?;
    lead(&leader, &fence).await?;
    let first = ask(&client, "drain node-3", LONG).await?;
    let mut watched = Watched::requests(&client, cx.soon()).await?;
    faults.inject(Fault::CutWatches).await?;
    watched.error(cx.soon()).await?;
    answer(&leader, &first.id, &fence, "done").await?;
    let second = ask(&leader, "drain node-4", LONG).await?;
    let watched = Watched::requests(&client, cx.soon()).await?;
    let of = |request: &Request| watched.view.requests.get(&request.id);
    let answered = of(&first).is_some_and(|it| it.answer.is_some());
    ensure!(answered && of(&second).is_some(), "the next watch shows {:?}", watched.view);
    Ok(())
}
