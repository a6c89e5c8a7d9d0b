//! What the server refuses for ever: encodings, values, users without rights.

use tritmill_queue::{
    Prompt, Store, StoreError,
    store::{PostgresStore, SchemaError},
};
use tritmill_servers::Postgres;

use super::{conformance::job, execute, start};

async fn create(server: &Postgres, name: &str, encoding: &str) -> String {
    let create = format!(
        "CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    );
    execute(server, &create).await;
    format!("postgres://postgres@127.0.0.1:{}/{name}", server.port())
}

#[tokio::test]
async fn encodings_that_lack_characters_are_refused_by_name() {
    let server = Postgres::start().unwrap();
    let latin = create(&server, "latin", "LATIN1").await;
    for refused in
        [PostgresStore::migrate(&latin).await.err(), PostgresStore::connect(&latin).await.err()]
    {
        let Some(StoreError::Migrate(cause)) = refused else { panic!("{refused:?}") };
        let said = cause.to_string();
        assert!(said.contains("LATIN1") && said.contains("ENCODING 'UTF8'"), "{said}");
        assert_eq!(
            *cause.downcast::<SchemaError>().unwrap(),
            SchemaError::Encoding("LATIN1".into())
        );
    }
    for (name, encoding) in [("unicode", "UTF8"), ("bytes", "SQL_ASCII")] {
        let url = create(&server, name, encoding).await;
        PostgresStore::migrate(&url).await.unwrap();
        let store = PostgresStore::connect(&url).await.unwrap();
        let mut polish = job();
        polish.prompt = Prompt::Text("Zażółć gęślą jaźń 試".to_owned());
        store.submit(std::slice::from_ref(&polish)).await.unwrap();
        assert_eq!(store.job(polish.id).await.unwrap().unwrap().job, polish, "{encoding}");
    }
}

#[tokio::test]
async fn parameters_of_libpq_connect() {
    let (server, _store) = start().await;
    let url = format!(
        "{}?sslmode=prefer&channel_binding=prefer&connect_timeout=10&keepalives=1&keepalives_idle=30&\
         gssencmode=disable&application_name=mine&options=-c%20geqo%3Doff&target_session_attrs=any&\
         fallback_application_name=other&sslcompression=0&passfile=/none&krbsrvname=postgres",
        server.url()
    );
    PostgresStore::connect(&url).await.unwrap().submit(&[job()]).await.unwrap();
    let url = format!("{}?options=-c%20no_such%3D1", server.url());
    let refused = PostgresStore::connect(&url).await.unwrap_err();
    assert!(matches!(refused, StoreError::Refused(_)), "{refused}");
    assert!(refused.to_string().contains("no_such"), "{refused}");
}

#[tokio::test]
async fn refused_value_is_no_outage() {
    let (server, store) = start().await;
    execute(&server, "ALTER TABLE open_jobs ADD CONSTRAINT short CHECK (octet_length(job) < 2000)")
        .await;
    let mut long = job();
    // Not alike, so that no compression helps.
    long.prompt = Prompt::Text((0..3000).map(|_| fastrand::alphanumeric()).collect());
    let refused = store.submit(&[long]).await.unwrap_err();
    let StoreError::InvalidValue { problem, .. } = &refused else { panic!("{refused}") };
    assert!(problem.contains("\"short\"") && problem.contains("23514"), "{problem}");
    assert!(refused.is_permanent());
    store.submit(&[job()]).await.unwrap();
}

#[tokio::test]
async fn user_without_rights_is_told_what_to_do() {
    let (server, _store) = start().await;
    execute(&server, "CREATE ROLE guest LOGIN").await;
    let url = format!("postgres://guest@127.0.0.1:{}/postgres", server.port());
    let refused = PostgresStore::connect(&url).await.unwrap_err();
    assert!(matches!(refused, StoreError::Refused(_)), "{refused}");
    let said = refused.to_string();
    assert!(said.contains("42501") && said.contains("grant the user"), "{said}");
}
